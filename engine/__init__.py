"""The built-in engine: vLLM V1 semantics on torch, behind an OpenAI-compatible server."""
