"""Loaders that prepare the next batches while the current one trains. Needs no framework and no runtime."""

from horoclone.data.data_loader_base import AsyncDataLoaderMixin, BaseDataLoader

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]
