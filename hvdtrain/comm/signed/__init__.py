"""What ranks send each other where a stranger may reach the connection: JSON that is signed with the secret of the job."""
