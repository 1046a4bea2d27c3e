"""What a person looks at: pages, pictures, tables, the terminal."""
