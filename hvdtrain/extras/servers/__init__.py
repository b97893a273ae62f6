"""Parameter servers: ranks that hold the weights and update them, and ranks that compute gradients
and do not wait for each other; hvdtrain replay recomputes their updates."""
