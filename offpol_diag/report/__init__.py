"""What a report says, as blocks (`sections`), and how blocks are drawn (`render`)."""
