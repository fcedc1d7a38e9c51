"""Keys of what passes between the engine and its schedulers beside weights. Messages are flat (sync/flat.py): every
storage that crosses a process border costs a file descriptor (CPU) or an IPC handle (CUDA)."""

VERSION = "#version"  # key of the tensor that opens an update: the WeightVersion as JSON
DISK = "#disk"  # key of the tensor that has schedulers read all weights of an update from a directory
WATCH = "#watch"  # key of the tensor that starts (empty) or ends (a path) the record of what passes through a scheduler
