"""Image generation: from a body to a request for diffusion workers, and from their steps to an answer."""
