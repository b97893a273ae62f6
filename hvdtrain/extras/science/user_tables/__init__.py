"""Tables that a user gives to a job or to a trained model: frames, and files for `predict`."""
