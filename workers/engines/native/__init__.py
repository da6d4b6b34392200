"""The embedded engine: model code and weights from transformers; the paged pool, the batches and the sampler ours."""
