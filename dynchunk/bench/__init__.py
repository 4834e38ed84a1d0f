"""What the kernels do with a GPU: by count, and measured where there is one."""
