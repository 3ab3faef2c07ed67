"""The protocol between processes: frames, headers, messages, authentication."""
