"""What plan and summary read of a model of torch."""
