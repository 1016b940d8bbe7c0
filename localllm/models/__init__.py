"""From a GGUF file to a `ModelSpec`: the table of architectures."""
