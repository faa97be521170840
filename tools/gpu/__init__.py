"""Everything that touches CUDA. Imported only in a GPU worker or one-shot child process, never by the agent itself."""
