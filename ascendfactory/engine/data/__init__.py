"""The data path: files → samples → tokens with a mask → rows → micro-batches."""
