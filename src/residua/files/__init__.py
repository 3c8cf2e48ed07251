"""Read files with bounded time and memory, and write them durably."""
