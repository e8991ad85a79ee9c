"""Tables as autograd sees them: backward, row steps, compiled code, loops that are refused."""
