"""The metadata store's driver for etcd: a tree of nodes on flat keys, sessions on leases."""

from kvstore.meta.etcd.store import EtcdStore

__all__ = ["EtcdStore"]
