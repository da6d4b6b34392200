"""Times of an engine estimated from its model's config.json and its GPU's data sheet, without either."""
