"""The embedded engine: trains unmodified Hugging Face models; its only input is plan.json."""
