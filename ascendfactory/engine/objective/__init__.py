"""What is minimised: each file turns a model and a micro-batch into a loss."""
