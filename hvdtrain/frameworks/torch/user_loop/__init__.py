"""A script's own torch model and optimizer, whose loop the script has: what hvdtrain.init()
prepares."""
