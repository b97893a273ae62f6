"""`evaluate`, `predict` and `sample`: what the model of a run says or draws, on any number of
ranks; nothing is trained."""
