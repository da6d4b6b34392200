"""A model in plain torch: loading, attention over a paged pool, sampling."""
