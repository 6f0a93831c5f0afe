from horoclone.data import (
    AsyncDataLoaderMixin as AsyncDataLoaderMixin,
    BaseDataLoader as BaseDataLoader,
)
