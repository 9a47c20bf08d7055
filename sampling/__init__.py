"""Samplers other than the plain one: vLLM here, vLLM servers, models behind an API."""
