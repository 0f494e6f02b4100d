"""What the user brings: functions such as rewards and graders, each in a process of its own, and HTTP servers."""
