from horoclone.spark.common.store import (
    DBFSLocalStore as DBFSLocalStore,
    FilesystemStore as FilesystemStore,
    HDFSStore as HDFSStore,
    LocalStore as LocalStore,
    Store as Store,
    Unsupported as Unsupported,
)
