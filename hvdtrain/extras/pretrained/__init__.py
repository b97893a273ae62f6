"""Fine-tuning: model.weights loads the weights of a file or folder, model.lora adds adapters."""
