"""What runs on tensors: many adapters on one frozen model, packed rows, exact log-probabilities."""
