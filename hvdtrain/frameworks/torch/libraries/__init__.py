"""Models of other libraries, by the libraries' names: model.name=LIBRARY:NAME."""
