"""Publishing and following weights: what lies in a store, and how tensors are compared with it and changed by it."""
