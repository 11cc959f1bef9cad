"""Object stores on the loopback interface."""
