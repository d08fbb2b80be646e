//! Small programs to copy from. Each is one file in `src/bin`.
