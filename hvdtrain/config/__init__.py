"""What a user can type: the schema, how it is read, its errors, its help, and the plugins that its
names mean."""
