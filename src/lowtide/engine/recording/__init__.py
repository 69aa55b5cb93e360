"""Recording a forward pass and following its backward pass: recorder, scopes, module tracker, verifier."""
