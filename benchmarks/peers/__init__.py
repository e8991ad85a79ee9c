"""The systems we measure against: scripts that run in environments of their own, and what builds those."""
