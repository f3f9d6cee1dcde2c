"""Several servers as one store: who they are is kept in a meta service, and each key belongs to one of them."""
