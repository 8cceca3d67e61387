"""Facts as data: models, devices, and what each back end is known to support. Every row names its source."""
