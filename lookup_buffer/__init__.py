"""A content-addressed lookup buffer for tensors."""
