"""Ways of trading time for memory; each file has one `apply_*`."""
