"""The command line, `hetu-fx`: each file parses one command and calls the Python function of the same name."""
