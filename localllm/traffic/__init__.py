"""A load generator for servers that speak Ollama's or OpenAI's API: `localllm bench serve`."""
