"""Installing a plan on a model and carrying it out: dropped stages, transfers and copy engines."""
