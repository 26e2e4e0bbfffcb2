"""The pool of KV pages: master (index), messenger (owner of the bytes), client."""
