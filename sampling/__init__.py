"""More samplers: vLLM in this process, vLLM servers, and models behind a chat API."""
