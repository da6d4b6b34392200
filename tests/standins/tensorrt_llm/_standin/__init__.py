"""What is not TensorRT-LLM: the little engine underneath, its switches, and handles for tests."""
