"""The demonstration: two real vLLM engines share encoder outputs through a real Redis."""
