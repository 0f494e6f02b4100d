"""Python functions of the user's own, such as rewards and graders, each in a process of its own."""
