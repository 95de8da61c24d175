"""C kernels for the CPU: built at first use (`build`), called through ctypes (`lib`), exposed as `CpuOps`."""
