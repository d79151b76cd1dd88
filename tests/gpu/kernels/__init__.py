"""The kernels against their specification."""
