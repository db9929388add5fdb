"""Tables of the whole cluster in the metadata store, each in one node: users and roles, namespaces."""
