"""What the recorder does with each op and each saved tensor: by a rule, online, profiled or planned."""
