"""One file for each way of splitting the work; each has one `apply_*`."""
