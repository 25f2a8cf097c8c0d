"""The training stages: data, loss and evaluation of each."""
