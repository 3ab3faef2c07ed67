"""What processes say to each other: frames, headers, messages, authentication."""
